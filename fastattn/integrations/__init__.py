"""fastattn inside other people's code. Users import the module that they need."""
