"""From text to batches: `corpus` finds and splits the text, `tokenizer` makes it ids, `batches` serves them."""
