"""One module a backend: what each provides is ``fastattn.registry.Backend``."""
