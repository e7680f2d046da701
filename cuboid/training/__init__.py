"""The training loop and what it needs: loss, optimizer, learning rate, metrics."""
