"""Models from and to folders of Hugging Face: `config.json`, sharded safetensors, tokenizer files."""
