"""Second derivatives of any torch model."""
