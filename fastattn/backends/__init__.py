"""One module a backend: what each provides is ``fastattn.backends.registry.Backend``."""
