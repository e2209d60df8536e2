"""English to Chinese with an LSTM encoder-decoder, with several kinds of attention and none."""
