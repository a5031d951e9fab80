"""What crosses a border between rooms: plain data that checks itself once."""
