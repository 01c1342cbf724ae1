"""A small Ollama and a small ComfyUI, for the demo and as the base of the tests' fakes.

They answer as the real ones do on the wire, take time as the real ones do, and know what they hold
of the card, so that a reader can see whether two engines ever meet on it. No GPU is touched.
"""

from ocgpu.simulators.comfyui import ComfySimulator
from ocgpu.simulators.ollama import OllamaSimulator
from ocgpu.simulators.usage import Usage

__all__ = ["ComfySimulator", "OllamaSimulator", "Usage"]
