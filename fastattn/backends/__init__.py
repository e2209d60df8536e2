"""The backends, one module each; ``fastattn.backends.registry.Backend`` is their interface."""
