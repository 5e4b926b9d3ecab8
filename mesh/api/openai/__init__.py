"""OpenAI's endpoints: one file each, their schemas, and how a stream is written."""
