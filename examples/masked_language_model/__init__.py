"""A small BERT: pre-trained to fill gaps in texts, then taught to classify with few labels."""
