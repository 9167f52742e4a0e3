"""Pages in a browser: one theme, libraries that come with the package, and a server for this machine only."""
