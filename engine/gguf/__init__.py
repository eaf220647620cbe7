"""GGUF models (llama.cpp's file format), free of torch: header, configuration, names of tensors, tokenizer.

``folder.open_gguf_folder`` presents such a model as a Hugging Face folder; ``engine.weights.gguf`` reads its weights.
"""
