"""Images on their way into a model: pixels, the encoder, rows in the place of placeholders."""
