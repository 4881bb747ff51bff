"""From checkpoint tensors to model parameters, strictly."""
