"""English to Chinese: LSTMs with several kinds of attention, and with none; a Transformer."""
