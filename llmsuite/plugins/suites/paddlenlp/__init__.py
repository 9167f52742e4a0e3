"""Recipes from the argument files of PaddleNLP's llm/ scripts."""
