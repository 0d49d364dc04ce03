"""One run: its folder, how it begins and resumes, when it saves, and what happens after a bad step."""
