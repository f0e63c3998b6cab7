"""The server: requests and answers of the OpenAI API, a page, and a thread of steps."""
