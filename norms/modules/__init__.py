"""Norms in other networks: for images, in a recurrence, in an MLP. No language model here needs them: no flag."""
