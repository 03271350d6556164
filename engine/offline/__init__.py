"""What the offline face (`llm.py`) is made of."""
