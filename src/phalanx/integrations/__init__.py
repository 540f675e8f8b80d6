"""Phalanx inside other frameworks. Import the module for yours; `import phalanx` loads none of them."""
