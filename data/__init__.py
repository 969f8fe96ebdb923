"""Text to batches: `sources` finds files, `corpus` splits documents, `tokenizer` encodes, `batches` cuts windows."""
