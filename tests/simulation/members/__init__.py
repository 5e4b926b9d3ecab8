"""A hearth in virtual time: the real code of every member but one, who is malicious."""
