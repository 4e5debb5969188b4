/* Functions of a library that is found at run time, by name, into a table of pointers. */
#ifndef ROPE_SYMBOLS_H
#define ROPE_SYMBOLS_H

#include <stddef.h>

typedef struct {
    const char *name;
    size_t offset; /* of its pointer in the table */
} rope_symbol;

/* Fills the table from `library`, of dlopen; NULL, or the name of the first function that is missing. */
const char *rope_load_symbols(void *library, const rope_symbol *symbols, size_t count, void *table);

#endif
