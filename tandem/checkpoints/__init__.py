"""Reading and writing model folders in Hugging Face format."""
