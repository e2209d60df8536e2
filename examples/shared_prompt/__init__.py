"""One prompt, many samples: the keys of the prompt are read once for all of them."""
