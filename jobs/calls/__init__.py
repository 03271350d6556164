"""Calls of tools: the forms in which models write them, and what is read of an answer."""
