"""Spans in time, and hidden or exposed communication computed from them."""
