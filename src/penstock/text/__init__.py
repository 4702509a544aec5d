"""Between text and token ids: tokenizer, template, stream. No torch."""
