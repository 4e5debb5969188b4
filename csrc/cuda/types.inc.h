/* The rows of one LAYOUT for every embedding type. */
#define E f32
#define R f32
#define ELEMENT float
#include "rows.inc.h"
#undef E
#undef ELEMENT

#define ELEMENT uint16_t
#define E f16
#include "rows.inc.h"
#undef E
#define E bf16
#include "rows.inc.h"
#undef E
#undef R
#undef ELEMENT

#define E f64
#define R f64
#define ELEMENT double
#include "rows.inc.h"
#undef E
#undef R
#undef ELEMENT
#undef LAYOUT
#undef LAYOUT_NAME
