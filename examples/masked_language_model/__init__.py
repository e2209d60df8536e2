"""A small BERT: pre-trained to fill gaps in texts, then fine-tuned with few labels."""
