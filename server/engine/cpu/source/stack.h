// What a call for all layers gets: the model, and the step.
#pragma once
#include "weights.h"

typedef struct {
    const float *input_norm, *post_norm;  // [hidden]
    const float *query_norm, *key_norm;   // [head_dim], or NULL
    Weight qkv, output, gate_up, down;
    uint16_t *keys, *values;  // of the cache
} Layer;

typedef struct {
    const Layer *layers;
    const uint16_t *embedding;       // bfloat16 [vocabulary, hidden]
    const float *embedding_norm;     // [hidden] where the first layer reads (embedding, step->states), or NULL
    const float *final_norm;         // [hidden]
    const float *inverse_frequency;  // [rotary_dim / 2]
    const int64_t *captured;         // [num_layers + 1], place among the captured boundaries, or -1
    int64_t num_layers, hidden, intermediate, heads, kv_heads, head_dim, rotary_dim, page_size, captures;
    int64_t quantized, plain;   // which forms of the tokens the weights read
    int64_t begins_normed;      // whether a head's residual stream begins with the norm of step->states
    double eps, angle_scale;
} Stack;

typedef struct {
    int64_t tokens, sequences, table_width;
    const int64_t *ids, *positions, *slots;  // [tokens]
    const int64_t *query_start;              // [sequences + 1]
    const int64_t *tables;                   // [sequences, table_width]
    const uint16_t *states;                  // bfloat16 [tokens, hidden], the residual stream that a head begins with
    uint16_t *hidden;                        // bfloat16 [tokens, hidden], the result
    uint16_t *captured;                      // bfloat16 [tokens, captures * hidden]
} Step;
