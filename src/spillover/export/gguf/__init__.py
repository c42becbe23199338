"""GGUF, as llama.cpp reads it (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

architecture   hyperparameters, and which models llama.cpp computes as their authors do
tensors        names, shapes, and the order of rows that llama.cpp rotates
vocabulary     the tokenizer
writer         all of it into one file, a block of rows at a time
reader         the way back, to a folder that an engine runs
"""
