"""Small stand-ins for Ollama and ComfyUI."""
