"""`flash3 demo`: real models answer through flash3, beside their own attention. Start reading at `command`."""
