"""Phalanx inside other frameworks. Import the file of yours: nothing here is loaded by `import phalanx`."""
