"""What the user sees: tables for the terminal, figures for the page."""
