"""Models in GGUF files, as llama.cpp has them: one file with the weights, what the model is, and its vocabulary."""
