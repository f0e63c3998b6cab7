"""Methods of adapters: what they configure, and how folders of ``peft`` describe them."""
