"""Ollama's endpoints: another form of the chats, texts and lists of `mesh.api.openai`."""
