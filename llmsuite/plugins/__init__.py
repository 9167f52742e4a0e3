"""Plugins that come with llmsuite. Each uses only what `docs/guide/plugins.md` offers to every author of plugins."""
