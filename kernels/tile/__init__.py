"""What happens inside a tile, whatever the score: loads, masks, softmax, dropout."""
