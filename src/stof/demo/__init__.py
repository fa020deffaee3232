"""The main job on real input: a real checkpoint on ragged text, and a long document under sparse masks."""
