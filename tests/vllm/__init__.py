"""Our clients and our service on a real vLLM: ``make test-vllm``."""
