"""Checkpoints that belong to the model, not to the layout: any layout reads what any layout wrote."""
