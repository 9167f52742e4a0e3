"""One local page from a recipe to a model that talks: choose, change, plan, start, watch, chat."""
