"""A small BERT: pre-trained to fill gaps in texts, then fine-tuned to classify with few labels."""
