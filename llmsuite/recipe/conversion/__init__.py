"""What every conversion into a recipe shares: the arguments, the family of a model, what is told and refused."""
