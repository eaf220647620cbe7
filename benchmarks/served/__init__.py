"""The engine's server beside llama.cpp's and vLLM's under growing load, measured by AIPerf, NVIDIA's public tool."""
