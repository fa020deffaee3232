"""Adapters to other libraries; each is imported on its own, so `import stof` stays free of them.

`import stof.integrations.transformers` registers `attn_implementation="stof"` with Hugging Face transformers.
"""
