"""Other libraries' training loops on parallel modules: one file a library, imported by whoever has it."""
