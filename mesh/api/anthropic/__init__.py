"""Anthropic's Messages API: another form of the chats and lists of `mesh.api.openai`."""
