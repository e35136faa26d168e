"""Every collective and send or receive, each owned by a Pending."""
